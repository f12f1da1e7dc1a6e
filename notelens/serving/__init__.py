"""Engines spoken to over HTTP: a client, prompts that their prefix caches like, a load generator, and skills inside vLLM.

Nothing is imported before it is used: the plug-in runs in the engine's environment, with torch and safetensors and nothing else
of ours.
"""
