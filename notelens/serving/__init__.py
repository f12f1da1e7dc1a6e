"""Engines spoken to over HTTP: a client, prompts that their prefix caches like, a load generator. Imports nothing by itself."""
