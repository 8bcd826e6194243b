"""Communication: effects on buffers. Knows no bucket, no model and no schedule."""
