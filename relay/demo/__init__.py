"""`relay demo`: a small shop, its outbox and a broker on a bare machine, live on the terminal."""
