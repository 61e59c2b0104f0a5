"""Serving: models behind the HTTP interface of OpenAI."""
