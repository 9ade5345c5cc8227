"""Settings: YAML files in, frozen contracts out. The edge where configuration is checked, once."""

from rungway.settings.effective import effective, ladder_digest, rungway_digest
from rungway.settings.keys import add_key, generate_key, hash_key, make_demo_keys, revoke_key
from rungway.settings.load import load_platform

__all__ = [
    "add_key",
    "effective",
    "generate_key",
    "hash_key",
    "ladder_digest",
    "load_platform",
    "make_demo_keys",
    "revoke_key",
    "rungway_digest",
]
