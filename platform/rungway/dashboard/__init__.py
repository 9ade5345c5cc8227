"""The dashboard: pages and data for people, signed in with a key. Mounted by the gateways under /dashboard."""
