"""Built-in environments: a calculator, a key-value store, a code sandbox, a search over a local corpus, a game of sliding tiles."""
