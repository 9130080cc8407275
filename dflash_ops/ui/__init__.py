"""What a person sees, and `--json`: two views of the same events. A view decides nothing."""
