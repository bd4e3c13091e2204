"""How catalogues are made, fetched, checked and converted; used from a checkout, never installed."""
