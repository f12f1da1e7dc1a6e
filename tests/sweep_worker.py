"""Imported by worker processes of test sweeps."""

from tests.sweep_cases import install

install()
