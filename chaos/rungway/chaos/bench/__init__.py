"""Benchmarks: one platform beside other gateways under one load client, and long runs that look for leaks."""
