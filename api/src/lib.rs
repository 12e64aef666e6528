//! The HTTP API. This page lists every route; each noun's handlers are in a file of its name and hold no
//! rules and no SQL.

mod admin;
mod agent_operations;
mod agent_program;
mod arguments;
mod artifacts;
mod blobs;
mod claims;
mod docs;
mod error;
mod events;
mod exchanges;
mod fields;
mod guard;
mod health;
mod instance_vms;
mod instances;
mod interfaces;
mod issuers;
mod keys;
mod labels;
mod login;
mod metadata;
mod metrics;
mod namespaces;
mod networks;
mod nodes;
mod operations;
mod pages;
mod patient;
pub(crate) mod peer;
mod request;
mod response;
mod root;
mod rules;
mod server;
mod table;
mod trusts;
mod uploads;

use std::sync::Arc;

use utoipa_axum::routes;

pub use metrics::metrics;
use muster_control::app::App;
pub use request::Service;
pub use server::{Listener, Tls, serve};
use table::Table;
pub use table::{Access, RouteInfo};

/// Every route, with who may call it and the family of its scope.
fn table(app: &Arc<App>) -> Table {
    use Access::{Admin, Public, Token};

    let mut table = Table::new(app);
    table.add(Public, "", routes!(root::root));
    table.add(Public, "", routes!(health::livez));
    table.add(Public, "", routes!(health::readyz));
    table.add(Public, "", routes!(health::healthz));
    table.add(Public, "", routes!(docs::document));
    table.add(Public, "", routes!(docs::page));
    table.add(Public, "", routes!(docs::file));
    table.add(Public, "", routes!(agent_program::install));
    table.add(Public, "", routes!(agent_program::program));

    table.add(Public, "auth", routes!(login::log_in));
    table.add(Public, "auth", routes!(exchanges::create));
    table.add(Token, "auth", routes!(namespaces::list));
    table.add(Admin, "auth", routes!(namespaces::create));
    table.add(Token, "auth", routes!(namespaces::get));
    table.add(Admin, "auth", routes!(namespaces::delete));
    table.add(Admin, "auth", routes!(namespaces::list_events));
    table.add(Token, "auth", routes!(keys::list, keys::create));
    table.add(Admin, "auth", routes!(keys::update_named_in_body));
    table.add(Admin, "auth", routes!(keys::update));
    table.add(Token, "auth", routes!(keys::delete));
    table.add(Token, "auth", routes!(trusts::create));
    table.add(Token, "auth", routes!(trusts::delete));
    table.add(Admin, "auth", routes!(claims::list, claims::create));
    table.add(Admin, "auth", routes!(claims::get, claims::update, claims::delete));
    table.add(Admin, "auth", routes!(claims::list_events));
    table.add(Token, "auth", routes!(namespaces::metadata::list, namespaces::metadata::create));
    table.add(Token, "auth", routes!(namespaces::metadata::update, namespaces::metadata::delete));
    table.add(Token, "rule", routes!(rules::list, rules::create));
    table.add(Token, "rule", routes!(rules::get, rules::update, rules::delete));
    table.add(Token, "rule", routes!(rules::list_events));
    table.add(Admin, "issuer", routes!(issuers::list, issuers::create));
    table.add(Admin, "issuer", routes!(issuers::get, issuers::update, issuers::delete));
    table.add(Admin, "issuer", routes!(issuers::list_events));

    table.add(Admin, "node", routes!(nodes::list));
    table.add(Admin, "node", routes!(nodes::get, nodes::delete));
    table.add(Admin, "node", routes!(nodes::process_metrics));
    table.add(Admin, "node", routes!(nodes::list_events));
    table.add(Admin, "node", routes!(nodes::metadata::list, nodes::metadata::create));
    table.add(Admin, "node", routes!(nodes::metadata::update, nodes::metadata::delete));

    table.add(Token, "network", routes!(networks::list, networks::create, networks::delete_all));
    table.add(Token, "network", routes!(networks::get, networks::delete));
    table.add(Token, "network", routes!(networks::delete_by_long_path));
    table.add(Token, "network", routes!(networks::list_events));
    table.add(Token, "network", routes!(networks::list_interfaces));
    table.add(Token, "network", routes!(networks::list_addresses));
    table.add(Token, "network", routes!(networks::reserve, networks::release));
    table.add(Token, "network", routes!(networks::ping));
    table.add(Token, "network", routes!(networks::route));
    table.add(Token, "network", routes!(networks::unroute));
    table.add(Token, "network", routes!(networks::set_name, networks::remove_name));
    table.add(Token, "network", routes!(networks::list_operations));
    table.add(Token, "network", routes!(networks::metadata::list, networks::metadata::create));
    table.add(Token, "network", routes!(networks::metadata::update, networks::metadata::delete));

    table.add(Token, "instance", routes!(instances::list, instances::create, instances::delete_all));
    table.add(Token, "instance", routes!(instances::get, instances::delete));
    table.add(Token, "instance", routes!(instances::list_interfaces, instances::plug));
    table.add(Token, "instance", routes!(instances::list_snapshots, instances::create_snapshot));
    table.add(Token, "instance", routes!(instances::list_events));
    table.add(Token, "instance", routes!(instances::list_operations));
    table.add(Token, "instance", routes!(instances::metadata::list, instances::metadata::create));
    table.add(Token, "instance", routes!(instances::metadata::update, instances::metadata::delete));
    table.add(Token, "instance", routes!(instance_vms::reboot_soft));
    table.add(Token, "instance", routes!(instance_vms::reboot_hard));
    table.add(Token, "instance", routes!(instance_vms::power_on));
    table.add(Token, "instance", routes!(instance_vms::power_off));
    table.add(Token, "instance", routes!(instance_vms::pause));
    table.add(Token, "instance", routes!(instance_vms::unpause));
    table.add(Token, "instance", routes!(instance_vms::console_data, instance_vms::clear_console_data));
    table.add(Token, "instance", routes!(instance_vms::screenshot));
    table.add_for(Token, "instance", Some("console"), routes!(instance_vms::vdi_helper));
    table.add_for(Token, "instance", Some("console"), routes!(instance_vms::vdi_proxy));
    table.add_for(Token, "instance", Some("execute"), routes!(agent_operations::execute));
    table.add(Token, "instance", routes!(agent_operations::put));
    table.add(Token, "instance", routes!(agent_operations::get_file));
    table.add(Token, "instance", routes!(agent_operations::list));
    table.add(Token, "instance", routes!(instance_vms::agent_facts));

    table.add(Token, "agentoperation", routes!(agent_operations::get, agent_operations::delete));
    table.add(Token, "agentoperation", routes!(agent_operations::list_events));

    table.add(Token, "interface", routes!(interfaces::get));
    table.add(Token, "interface", routes!(interfaces::float));
    table.add(Token, "interface", routes!(interfaces::defloat));
    table.add(Token, "interface", routes!(interfaces::metadata::list, interfaces::metadata::create));
    table.add(Token, "interface", routes!(interfaces::metadata::update, interfaces::metadata::delete));

    table.add(Token, "artifact", routes!(artifacts::list, artifacts::create, artifacts::delete_all));
    table.add(Token, "artifact", routes!(artifacts::create_version));
    table.add(Token, "artifact", routes!(artifacts::get, artifacts::delete));
    table.add(Token, "artifact", routes!(artifacts::list_versions, artifacts::set_max_versions));
    table.add(Token, "artifact", routes!(artifacts::delete_version));
    table.add(Token, "artifact", routes!(artifacts::share));
    table.add(Token, "artifact", routes!(artifacts::unshare));
    table.add(Token, "artifact", routes!(artifacts::list_events));
    table.add(Token, "artifact", routes!(artifacts::list_operations));
    table.add(Token, "artifact", routes!(artifacts::metadata::list, artifacts::metadata::create));
    table.add(Token, "artifact", routes!(artifacts::metadata::update, artifacts::metadata::delete));

    table.add(Token, "label", routes!(labels::get, labels::update, labels::delete));

    table.add(Token, "upload", routes!(uploads::create));
    table.add(Token, "upload", routes!(uploads::get, uploads::append));
    table.add(Token, "upload", routes!(uploads::truncate));

    table.add(Admin, "blob", routes!(blobs::list));
    table.add(Token, "blob", routes!(blobs::get));
    table.add(Token, "blob", routes!(blobs::data));
    table.add(Token, "blob", routes!(blobs::list_events));
    table.add(Token, "blob", routes!(blobs::checksum));
    table.add(Token, "blob", routes!(blobs::search));
    table.add(Token, "blob", routes!(blobs::search_nothing));
    table.add(Token, "blob", routes!(blobs::metadata::list, blobs::metadata::create));
    table.add(Token, "blob", routes!(blobs::metadata::update, blobs::metadata::delete));

    table.add(Token, "clusteroperation", routes!(operations::list));
    table.add(Token, "clusteroperation", routes!(operations::get));
    table.add(Token, "clusteroperation", routes!(operations::chain));

    table.add(Admin, "admin", routes!(admin::locks));
    table.add(Admin, "admin", routes!(admin::resources));
    table.add(Admin, "admin", routes!(admin::console_keys));
    table
}

/// The API as a service, and what its routes are.
#[must_use]
pub fn service(app: &Arc<App>) -> (Service, Vec<RouteInfo>) {
    let (router, document, routes) = table(app).finish();
    (Service::new(Arc::clone(app), router, document, &routes), routes)
}
