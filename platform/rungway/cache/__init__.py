"""Answers kept for exact repeats, one partition per tenant."""
