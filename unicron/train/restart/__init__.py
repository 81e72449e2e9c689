"""Programs that know nothing of Unicron, run again in each membership."""
