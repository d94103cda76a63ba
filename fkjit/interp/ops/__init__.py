"""Instructions on registers alone."""
