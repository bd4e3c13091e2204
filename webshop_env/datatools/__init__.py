"""Tools for catalogues: check a user's own, fetch the public ones, build what makes a shop open fast."""
