"""The notifier: sends people notices of the journal's incidents, and escalates until somebody answers."""
