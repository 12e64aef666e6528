//! `/clusteroperations`.

use muster_types::operation::OperationRecord;

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::{path, with_query};

impl Client {
    /// Returns an operation.
    pub async fn operation(&self, operation_type: &str, id: &str) -> Result<ApiResponse<OperationRecord>> {
        self.get(path(&["clusteroperations", operation_type, id])?).await
    }

    /// Lists an operation and its dependencies, newest first.
    pub async fn operation_chain(
        &self,
        id: &str,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<OperationRecord>>> {
        self.get_list(path(&["clusteroperations", id, "chain"])?, query).await
    }

    /// Lists the operations on an object, newest first.
    pub async fn operations(
        &self,
        target_type: &str,
        target: &str,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<OperationRecord>>> {
        let pairs = [("target_object_type", Some(target_type)), ("target_uuid", Some(target))];
        self.get_list(with_query(path(&["clusteroperations"])?, &pairs), query).await
    }
}
