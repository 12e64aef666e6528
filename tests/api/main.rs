//! The API as callers see it, on a cluster in this process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod access;
mod addresses;
mod agent;
mod artifacts;
mod auth;
mod claims;
mod events;
mod federation;
mod fetch;
mod instances;
mod namespaces;
mod networks;
mod nodes;
mod openapi;
mod operations;
mod requests;
mod scopes;
