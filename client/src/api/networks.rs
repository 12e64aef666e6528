//! `/networks`.

use std::net::Ipv4Addr;

use muster_types::address::AddressRecord;
use muster_types::ids::NetworkId;
use muster_types::interface::InterfaceRecord;
use muster_types::network::{NetworkRecord, PingResult};
use muster_types::operation::{OperationHandle, OperationRecord};
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::{path, with_query};

/// A network to create.
#[derive(Debug, Clone, Serialize)]
pub struct NewNetwork {
    pub name: String,
    pub netblock: String,
    pub provide_dhcp: bool,
    pub provide_nat: bool,
    pub provide_dns: bool,
    /// The caller's own namespace if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Whether the request is only checked.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// A network that is being deleted.
#[derive(Debug, Clone, Deserialize)]
pub struct NetworkDeletion {
    pub network_uuid: NetworkId,
    #[serde(flatten)]
    pub operation: OperationHandle,
    /// Why the network cannot be deleted yet.
    pub reason: Option<String>,
}

impl Client {
    /// Lists the visible networks, with `all` including deleted ones.
    pub async fn networks(&self, all: bool, query: &ListQuery) -> Result<ApiResponse<Vec<NetworkRecord>>> {
        self.get_list(with_query(path(&["networks"])?, &[("all", all.then_some("true"))]), query).await
    }

    /// Returns a network by name or id.
    pub async fn network(&self, network: &str) -> Result<ApiResponse<NetworkRecord>> {
        self.network_in(network, None).await
    }

    /// Returns a network by name or id if it is in the given namespace.
    pub async fn network_in(
        &self,
        network: &str,
        namespace: Option<&str>,
    ) -> Result<ApiResponse<NetworkRecord>> {
        self.get(with_query(path(&["networks", network])?, &[("namespace", namespace)])).await
    }

    /// Creates a network. It is usable once its state is `created`.
    pub async fn create_network(&self, new: &NewNetwork) -> Result<ApiResponse<NetworkRecord>> {
        self.call(Method::POST, path(&["networks"])?, Some(json!(new))).await
    }

    /// Starts an operation that deletes a network.
    pub async fn delete_network(&self, network: &str) -> Result<ApiResponse<OperationHandle>> {
        self.delete(path(&["networks", network])?).await
    }

    /// Deletes all networks of a namespace; networks with interfaces once the interfaces are deleted.
    pub async fn delete_networks(
        &self,
        namespace: Option<&str>,
    ) -> Result<ApiResponse<Vec<NetworkDeletion>>> {
        let body = json!({ "confirm": true, "namespace": namespace });
        self.call(Method::DELETE, path(&["networks"])?, Some(body)).await
    }

    /// Lists the interfaces on a network.
    pub async fn network_interfaces(
        &self,
        network: &str,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<InterfaceRecord>>> {
        self.get_list(path(&["networks", network, "interfaces"])?, query).await
    }

    /// Lists the allocated addresses of a network.
    pub async fn network_addresses(
        &self,
        network: &str,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<AddressRecord>>> {
        self.get_list(path(&["networks", network, "addresses"])?, query).await
    }

    /// Reserves an address so that it is not allocated.
    pub async fn reserve_address(
        &self,
        network: &str,
        address: &str,
        comment: Option<&str>,
    ) -> Result<ApiResponse<AddressRecord>> {
        let body = json!({ "comment": comment });
        self.call(Method::POST, path(&["networks", network, "addresses", address])?, Some(body)).await
    }

    /// Releases a reserved address.
    pub async fn release_address(&self, network: &str, address: &str) -> Result<ApiResponse<()>> {
        self.delete(path(&["networks", network, "addresses", address])?).await
    }

    /// Pings an address from the network's router.
    pub async fn ping(&self, network: &str, address: &str) -> Result<ApiResponse<PingResult>> {
        self.get(path(&["networks", network, "ping", address])?).await
    }

    /// Routes an address of the floating network to this one.
    pub async fn route_address(&self, network: &str) -> Result<ApiResponse<Ipv4Addr>> {
        self.call(Method::POST, path(&["networks", network, "route"])?, None).await
    }

    /// Stops routing an address.
    pub async fn unroute_address(&self, network: &str, address: &str) -> Result<ApiResponse<()>> {
        self.delete(path(&["networks", network, "route", address])?).await
    }

    /// Sets the address of a name in the network's DNS.
    pub async fn set_network_name(
        &self,
        network: &str,
        name: &str,
        address: &str,
    ) -> Result<ApiResponse<()>> {
        let body = json!({ "name": name, "value": address });
        self.call(Method::POST, path(&["networks", network, "dns"])?, Some(body)).await
    }

    /// Deletes a name from the network's DNS.
    pub async fn delete_network_name(&self, network: &str, name: &str) -> Result<ApiResponse<()>> {
        self.delete(with_query(path(&["networks", network, "dns"])?, &[("name", Some(name))])).await
    }

    /// Lists the unfinished operations on a network, or all of them, newest first.
    pub async fn network_operations(
        &self,
        network: &str,
        all: bool,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<OperationRecord>>> {
        let path = path(&["networks", network, "clusteroperations"])?;
        self.get_list(with_query(path, &[("all", Some(if all { "true" } else { "false" }))]), query).await
    }
}
