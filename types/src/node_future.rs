//! The futures of the calls to nodes.

use std::future::Future;
use std::pin::Pin;

use crate::Result;

/// The future returned by every call to a node.
pub type NodeFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;
