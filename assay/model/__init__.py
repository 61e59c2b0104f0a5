"""The one decoder, its cache, its foreign names, its tokenizer and its patches."""
