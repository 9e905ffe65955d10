"""`smartspec demo`: races, load and learning on one page."""
