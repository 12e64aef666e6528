//! API tests against an in-process cluster.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

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
mod isolation;
mod namespaces;
mod networks;
mod nodes;
mod openapi;
mod operations;
mod requests;
mod scopes;
