"""From plain text to batches of token ids."""
