"""One target, several drafters: each request goes to one of them."""
