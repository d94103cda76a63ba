"""Training steps of whole models, without and within a CUDA graph."""
