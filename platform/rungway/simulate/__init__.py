"""The whole platform on a virtual clock and one seed: the real controller core, played gateways, replicas and clients."""
