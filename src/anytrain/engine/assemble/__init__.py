"""Put the rooms together: the only place that calls constructors."""
