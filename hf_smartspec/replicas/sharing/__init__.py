"""What replicas of a service have served and learnt, shared through a folder that all of them reach."""
