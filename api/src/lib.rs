//! The HTTP API. This file lists every route; the handlers are in `routes`, one file per noun.

mod access;
mod arguments;
mod authorized_stream;
mod body;
mod browser_session;
mod compression;
mod conditional;
mod connection;
mod deadline;
mod document;
mod error;
mod etag;
mod forward;
mod guard;
mod idempotency;
mod incoming;
mod lenient;
mod lists;
mod metrics;
mod pages;
mod redaction;
mod request;
mod request_events;
mod response;
mod routes;
mod schemas;
mod server;
mod static_file;
mod table;
mod upgrade;
mod waiting;
mod websocket;
mod write_timeout;

use std::sync::Arc;

pub use access::{Access, RouteInfo};
pub use metrics::{MetricsKind, metrics};
use muster_control::app::App;
pub use request::Service;
use routes::{
    admin, agent_operations, agent_program, agent_terminal, artifacts, blobs, claims, console_tickets, docs,
    documentation, event_streams, exchanges, explanations, health, instance_console, instance_fencing,
    instance_migration, instance_power, instances, interfaces, invitations, issuers, keys, labels, login,
    namespaces, networks, node_drain, nodes, operations, quotas, rebalance, root, rules, sessions, trusts,
    ui, uploads, webhooks,
};
pub use server::{Listener, Tls, serve};
use table::{RouteTable, handlers};

/// Creates the table of routes: who may call each, and the family of the scope that it needs.
fn table(app: &Arc<App>) -> RouteTable {
    let mut table = RouteTable::new(app);
    // Each route needs kilobytes of stack without optimization, hence several functions.
    for add in [
        add_general_routes,
        add_auth_routes,
        add_node_routes,
        add_network_routes,
        add_instance_routes,
        add_artifact_routes,
        add_cluster_routes,
    ] {
        add(&mut table);
    }
    table
}

/// Adds the routes of the root, health, documents, the UI and the agent program.
fn add_general_routes(table: &mut RouteTable) {
    use Access::Public;

    table.add(Public, "", handlers!(root::root));
    table.add(Public, "", handlers!(health::livez));
    table.add(Public, "", handlers!(health::readyz));
    table.add(Public, "", handlers!(health::healthz));
    table.add(Public, "", handlers!(docs::document));
    table.add(Public, "", handlers!(docs::page));
    table.add(Public, "", handlers!(docs::file));
    table.add(Public, "", handlers!(documentation::index));
    table.add(Public, "", handlers!(documentation::file));
    table.add(Public, "", handlers!(ui::page));
    table.add(Public, "", handlers!(ui::file));
    table.add(Public, "", handlers!(agent_program::install));
    table.add(Public, "", handlers!(agent_program::program));
}

/// Adds the routes of logins, namespaces, keys, quotas, rules, webhooks and issuers.
fn add_auth_routes(table: &mut RouteTable) {
    use Access::{Admin, Public, Token};

    table.add(Public, "auth", handlers!(login::log_in));
    table.add(Public, "auth", handlers!(exchanges::create));
    table.add(Token, "", handlers!(sessions::create_ticket));
    table.add(Public, "auth", handlers!(sessions::create, sessions::delete));
    table.add(Token, "", handlers!(sessions::get));
    table.add(Token, "auth", handlers!(namespaces::list));
    table.add(Admin, "auth", handlers!(namespaces::create));
    table.add(Token, "auth", handlers!(namespaces::get));
    table.add(Admin, "auth", handlers!(namespaces::delete));
    table.add(Admin, "auth", handlers!(namespaces::list_events));
    table.add(Token, "auth", handlers!(keys::list, keys::create));
    table.add(Admin, "auth", handlers!(keys::update_named_in_body));
    table.add(Token, "auth", handlers!(keys::get));
    table.add(Admin, "auth", handlers!(keys::update));
    table.add(Token, "auth", handlers!(keys::delete));
    table.add(Token, "auth", handlers!(keys::metadata::list, keys::metadata::create));
    table.add(Token, "auth", handlers!(keys::metadata::update, keys::metadata::delete));
    table.add(Token, "auth", handlers!(trusts::create));
    table.add(Token, "auth", handlers!(trusts::delete));
    table.add(Admin, "auth", handlers!(claims::list, claims::create));
    table.add(Admin, "auth", handlers!(claims::get, claims::update, claims::delete));
    table.add(Admin, "auth", handlers!(claims::list_events));
    table.add(Admin, "auth", handlers!(claims::metadata::list, claims::metadata::create));
    table.add(Admin, "auth", handlers!(claims::metadata::update, claims::metadata::delete));
    table.add(Token, "auth", handlers!(quotas::list));
    table.add(Admin, "auth", handlers!(quotas::update, quotas::delete));
    table.add(Token, "auth", handlers!(namespaces::metadata::list, namespaces::metadata::create));
    table.add(Token, "auth", handlers!(namespaces::metadata::update, namespaces::metadata::delete));
    table.add(Token, "rule", handlers!(rules::list, rules::create));
    table.add(Token, "rule", handlers!(rules::get, rules::update, rules::delete));
    table.add(Token, "rule", handlers!(rules::list_events));
    table.add(Token, "rule", handlers!(rules::metadata::list, rules::metadata::create));
    table.add(Token, "rule", handlers!(rules::metadata::update, rules::metadata::delete));
    table.add(Token, "webhook", handlers!(webhooks::list, webhooks::create));
    table.add(Token, "webhook", handlers!(webhooks::get, webhooks::update, webhooks::delete));
    table.add(Token, "webhook", handlers!(webhooks::rotate_secret));
    table.add(Token, "webhook", handlers!(webhooks::test));
    table.add(Token, "webhook", handlers!(webhooks::list_deliveries));
    table.add(Token, "webhook", handlers!(webhooks::redeliver));
    table.add(Admin, "issuer", handlers!(issuers::list, issuers::create));
    table.add(Admin, "issuer", handlers!(issuers::get, issuers::update, issuers::delete));
    table.add(Admin, "issuer", handlers!(issuers::list_events));
    table.add(Admin, "issuer", handlers!(issuers::metadata::list, issuers::metadata::create));
    table.add(Admin, "issuer", handlers!(issuers::metadata::update, issuers::metadata::delete));
}

/// Adds the routes of nodes.
fn add_node_routes(table: &mut RouteTable) {
    use Access::Admin;

    table.add(Admin, "node", handlers!(nodes::list));
    table.add(Admin, "node", handlers!(nodes::get, nodes::delete));
    table.add(Admin, "node", handlers!(nodes::evacuate));
    table.add(Admin, "node", handlers!(node_drain::drain));
    table.add(Admin, "node", handlers!(node_drain::undrain));
    table.add(Admin, "node", handlers!(node_drain::start_maintenance));
    table.add(Admin, "node", handlers!(nodes::process_metrics));
    table.add(Admin, "node", handlers!(nodes::list_events));
    table.add(Admin, "node", handlers!(nodes::metadata::list, nodes::metadata::create));
    table.add(Admin, "node", handlers!(nodes::metadata::update, nodes::metadata::delete));
}

/// Adds the routes of networks.
fn add_network_routes(table: &mut RouteTable) {
    use Access::Token;

    table.add(Token, "network", handlers!(networks::list, networks::create, networks::delete_all));
    table.add(Token, "network", handlers!(networks::get, networks::delete));
    table.add(Token, "network", handlers!(networks::delete_legacy_path));
    table.add(Token, "network", handlers!(networks::list_events));
    table.add(Token, "network", handlers!(explanations::network));
    table.add(Token, "network", handlers!(networks::list_interfaces));
    table.add(Token, "network", handlers!(networks::list_addresses));
    table.add(Token, "network", handlers!(networks::reserve, networks::release));
    table.add(Token, "network", handlers!(networks::ping));
    table.add(Token, "network", handlers!(networks::route));
    table.add(Token, "network", handlers!(networks::unroute));
    table.add(Token, "network", handlers!(networks::set_name, networks::remove_name));
    table.add(Token, "network", handlers!(networks::list_operations));
    table.add(Token, "network", handlers!(networks::metadata::list, networks::metadata::create));
    table.add(Token, "network", handlers!(networks::metadata::update, networks::metadata::delete));
}

/// Adds the routes of instances, their agents and interfaces.
fn add_instance_routes(table: &mut RouteTable) {
    use Access::{Admin, Public, Token};

    table.add(Token, "instance", handlers!(instances::list, instances::create, instances::delete_all));
    table.add(Token, "instance", handlers!(instances::get, instances::delete));
    table.add(Token, "instance", handlers!(instances::list_interfaces, instances::plug));
    table.add(Token, "instance", handlers!(instances::list_snapshots, instances::create_snapshot));
    table.add(Token, "instance", handlers!(instances::list_events));
    table.add(Token, "instance", handlers!(explanations::instance));
    table.add(Token, "instance", handlers!(instances::list_operations));
    table.add(Token, "instance", handlers!(instances::metadata::list, instances::metadata::create));
    table.add(Token, "instance", handlers!(instances::metadata::update, instances::metadata::delete));
    table.add(Token, "instance", handlers!(instance_power::reboot_soft));
    table.add(Token, "instance", handlers!(instance_power::reboot_hard));
    table.add(Token, "instance", handlers!(instance_fencing::update));
    table.add(Token, "instance", handlers!(instance_migration::start));
    table.add(Token, "instance", handlers!(instance_migration::cancel));
    table.add(Admin, "instance", handlers!(instance_migration::connect));
    table.add(Token, "instance", handlers!(instance_power::power_on));
    table.add(Token, "instance", handlers!(instance_power::power_off));
    table.add(Token, "instance", handlers!(instance_power::pause));
    table.add(Token, "instance", handlers!(instance_power::unpause));
    table.add(
        Token,
        "instance",
        handlers!(instance_console::console_data, instance_console::clear_console_data),
    );
    table.add(Token, "instance", handlers!(instance_console::screenshot));
    table.add_with_verb(Token, "instance", Some("console"), handlers!(instance_console::open));
    table.add_with_verb(Token, "instance", Some("console"), handlers!(console_tickets::create));
    // The ticket is the authentication.
    table.add(Public, "", handlers!(console_tickets::open));
    table.add_with_verb(Token, "instance", Some("console"), handlers!(instance_console::vdi_helper));
    table.add_with_verb(Token, "instance", Some("console"), handlers!(instance_console::vdi_proxy));
    table.add_with_verb(Token, "instance", Some("execute"), handlers!(agent_operations::execute));
    table.add_with_verb(Token, "instance", Some("execute"), handlers!(agent_terminal::open));
    table.add(Token, "instance", handlers!(agent_operations::put));
    table.add(Token, "instance", handlers!(agent_operations::get_file));
    table.add(Token, "instance", handlers!(agent_operations::list));
    table.add(Token, "instance", handlers!(agent_operations::facts));

    table.add(Token, "agentoperation", handlers!(agent_operations::get, agent_operations::delete));
    table.add(Token, "agentoperation", handlers!(agent_operations::list_events));
    table.add(
        Token,
        "agentoperation",
        handlers!(agent_operations::metadata::list, agent_operations::metadata::create),
    );
    table.add(
        Token,
        "agentoperation",
        handlers!(agent_operations::metadata::update, agent_operations::metadata::delete),
    );

    table.add(Token, "interface", handlers!(interfaces::get));
    table.add(Token, "interface", handlers!(interfaces::float));
    table.add(Token, "interface", handlers!(interfaces::defloat));
    table.add(Token, "interface", handlers!(interfaces::metadata::list, interfaces::metadata::create));
    table.add(Token, "interface", handlers!(interfaces::metadata::update, interfaces::metadata::delete));
}

/// Adds the routes of artifacts, labels, uploads and blobs.
fn add_artifact_routes(table: &mut RouteTable) {
    use Access::{Admin, Token};

    table.add(Token, "artifact", handlers!(artifacts::list, artifacts::create, artifacts::delete_all));
    table.add(Token, "artifact", handlers!(artifacts::create_version));
    table.add(Token, "artifact", handlers!(artifacts::get, artifacts::delete));
    table.add(Token, "artifact", handlers!(artifacts::list_versions, artifacts::set_max_versions));
    table.add(Token, "artifact", handlers!(artifacts::delete_version));
    table.add(Token, "artifact", handlers!(artifacts::share));
    table.add(Token, "artifact", handlers!(artifacts::unshare));
    table.add(Token, "artifact", handlers!(artifacts::list_events));
    table.add(Token, "artifact", handlers!(artifacts::list_operations));
    table.add(Token, "artifact", handlers!(artifacts::metadata::list, artifacts::metadata::create));
    table.add(Token, "artifact", handlers!(artifacts::metadata::update, artifacts::metadata::delete));

    table.add(Token, "label", handlers!(labels::get, labels::update, labels::delete));

    table.add(Token, "upload", handlers!(uploads::create));
    table.add(Token, "upload", handlers!(uploads::get, uploads::append));
    table.add(Token, "upload", handlers!(uploads::truncate));
    table.add(Token, "upload", handlers!(uploads::metadata::list, uploads::metadata::create));
    table.add(Token, "upload", handlers!(uploads::metadata::update, uploads::metadata::delete));

    table.add(Admin, "blob", handlers!(blobs::list));
    table.add(Token, "blob", handlers!(blobs::get, blobs::delete));
    table.add(Token, "blob", handlers!(blobs::data));
    table.add(Token, "blob", handlers!(blobs::list_events));
    table.add(Token, "blob", handlers!(blobs::checksum));
    table.add(Token, "blob", handlers!(blobs::search));
    table.add(Token, "blob", handlers!(blobs::search_without_hash));
    table.add(Token, "blob", handlers!(blobs::metadata::list, blobs::metadata::create));
    table.add(Token, "blob", handlers!(blobs::metadata::update, blobs::metadata::delete));
}

/// Adds the routes of event streams, operations, invitations and administration.
fn add_cluster_routes(table: &mut RouteTable) {
    use Access::{Admin, Public, Token};

    // Each message needs the scope for reading its object.
    table.add(Token, "", handlers!(event_streams::open));

    table.add(Token, "clusteroperation", handlers!(operations::list));
    table.add(Token, "clusteroperation", handlers!(operations::get));
    table.add(Token, "clusteroperation", handlers!(operations::chain));
    table.add(Token, "clusteroperation", handlers!(explanations::operation));
    table.add(Token, "clusteroperation", handlers!(operations::metadata::list, operations::metadata::create));
    table.add(
        Token,
        "clusteroperation",
        handlers!(operations::metadata::update, operations::metadata::delete),
    );

    table.add(Admin, "node", handlers!(invitations::create));
    table.add(Public, "node", handlers!(invitations::redeem));
    table.add(Admin, "admin", handlers!(admin::locks));
    table.add(Admin, "admin", handlers!(admin::resources));
    table.add(Admin, "admin", handlers!(admin::upgrade));
    table.add(Admin, "admin", handlers!(rebalance::start));
    table.add(Admin, "admin", handlers!(admin::console_keys));
    table.add(Token, "admin", handlers!(admin::ca_certificate));
}

/// Creates the API service and the list of its routes.
#[must_use]
pub fn service(app: &Arc<App>) -> (Service, Vec<RouteInfo>) {
    let (router, document, routes, records) = table(app).finish();
    (Service::new(Arc::clone(app), router, document, &routes, records), routes)
}
