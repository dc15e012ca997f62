"""The transport that is always there: TCP, with or without TLS."""
