"""The controller: one per cell, single writer of quotas, queues, capacity and ladder state."""
