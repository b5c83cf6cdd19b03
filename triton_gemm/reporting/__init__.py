"""What people and ranks ask: which kernel a product runs on, all candidates, a fingerprint of choices, what works on a
machine."""
