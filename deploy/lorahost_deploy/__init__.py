"""Deployment of lorahost to SageMaker with boto3, and a local stand-in of the AWS services that it uses."""
