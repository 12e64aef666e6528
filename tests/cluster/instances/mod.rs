//! Instances on the real node of a real daemon.

mod client;
mod kill;
mod storm;
