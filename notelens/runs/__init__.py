"""Configurations, records, the runner and the command line."""
