"""Traces of every format in one form: `reading.read_trace`."""
