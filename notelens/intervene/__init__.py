"""Interventions: capture, the batched patch engine, and the same swaps through hooks."""
