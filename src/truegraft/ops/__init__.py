"""Device back ends behind one protocol. A row's value depends on its own inputs alone."""
