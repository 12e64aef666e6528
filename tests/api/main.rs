//! API tests against an in-process cluster.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod access;
mod addresses;
mod agent;
mod artifacts;
mod auth;
mod claims;
mod cluster_upgrade;
mod compression;
mod conditional;
mod console_tickets;
mod drain;
mod evacuation_races;
mod event_streams;
mod events;
mod fairness;
mod federation;
mod fetch;
mod idempotency;
mod instances;
mod invitations;
mod isolation;
mod lists;
mod lost_addresses;
mod lost_hosts;
mod mesh;
mod metadata;
mod migration;
mod namespaces;
mod networks;
mod nodes;
mod openapi;
mod operations;
mod quotas;
mod rebalance;
mod remote;
mod requests;
mod scopes;
mod service_keys;
mod sessions;
mod shared_storage;
mod statements;
mod ui;
mod waiting;
mod webhooks;
