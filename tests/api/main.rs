//! API tests against an in-process cluster.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

#[path = "../harness.rs"]
mod harness;
#[allow(dead_code, reason = "shared with the other tests, which use more of it")]
#[path = "../web.rs"]
mod web;

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
