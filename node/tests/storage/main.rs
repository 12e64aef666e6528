//! The storage of a node: drafts, blobs and images, with the real tools where they are needed.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod blobs;
mod disk_full;
mod drafts;
mod fixture;
mod images;
mod kill;
mod malicious;
mod thin;
