//! The API as callers see it, on a cluster in this process.

#[path = "../harness.rs"]
mod harness;

mod access;
mod auth;
mod events;
mod namespaces;
mod nodes;
mod openapi;
mod operations;
mod skin;
