"""Events read from the outbox table itself: NOTIFY wake-up, then reads by lane."""
