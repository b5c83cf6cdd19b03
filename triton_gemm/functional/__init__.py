"""torch's face: functions, their rules and words, operators with derivatives, and torch's own products routed here."""
