"""What operators see: the Prometheus metrics of a cell, kept by its controller so that any gateway answers for all."""
