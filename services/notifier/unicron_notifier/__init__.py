"""The notifier: incidents of the journal are told to people, and it is seen to that somebody answers."""
