"""The whole system in virtual time: the services' own cores, modelled nodes and training."""
