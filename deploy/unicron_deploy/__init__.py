"""Provisioners: what brings a cluster up and takes it down. The embedded one runs on this machine."""
