"""Other engines beside ours: each in a process of its own, driven by the same jobs, measured by the same arithmetic."""
