//! The disk of a node: drafts, blobs, images, with the real tools where they are needed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod blobs;
mod drafts;
mod full;
mod hostile;
mod images;
mod kill;
mod thin;
mod world;
