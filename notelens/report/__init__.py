"""Figures, pages and reference numbers. Everything here is a function of records; nothing here runs a model."""
