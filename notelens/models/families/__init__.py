"""One spec per model family."""
