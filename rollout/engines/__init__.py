"""Policies that write replies: a transformers model, a script."""
