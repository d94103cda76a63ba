"""`fkjit report`: stored results as one HTML page that works offline, and as pictures."""
